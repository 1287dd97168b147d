"""`python -m examples.reasoner`, see grpo.py."""

from examples.reasoner.grpo import main

if __name__ == "__main__":
    raise SystemExit(main())
