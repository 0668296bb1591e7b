"""`python -m trueup`: the same command as `trueup`."""

from trueup.cli import main

if __name__ == "__main__":
    main()
