"""`python -m tierkv` is the command `tierkv`."""

from tierkv.cli import main

if __name__ == "__main__":
    main()
