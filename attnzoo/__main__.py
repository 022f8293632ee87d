"""`python -m attnzoo` is the `attnzoo` command."""

from attnzoo.cli import main

if __name__ == "__main__":
    main()
