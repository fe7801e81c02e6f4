"""homeprefixd: a home AI server whose long prompts cost nothing the second time."""

__version__ = "0.1.0"
