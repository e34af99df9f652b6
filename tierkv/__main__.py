"""Entry point of the command `tierkv` and of `python -m tierkv`."""

import sys


def run() -> None:
    """Run the command line.

    Ctrl-C during the imports prints one sentence, without a traceback, and exits with code 130.
    """
    try:
        from tierkv.cli import main  # noqa: PLC0415 - this is what takes its time
    except KeyboardInterrupt:
        sys.stderr.write("error: stopped by Ctrl-C\n")
        sys.exit(130)
    main()


if __name__ == "__main__":
    run()
