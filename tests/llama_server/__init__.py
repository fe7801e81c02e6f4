"""llama.cpp's own server tests, run against this daemon: `scripts/llama-tests`. None of their text is here."""
