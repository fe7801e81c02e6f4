"""`python -m homeprefixd`: the same as the `homeprefixd` command."""

from .cli.main import main

if __name__ == "__main__":
    main()
