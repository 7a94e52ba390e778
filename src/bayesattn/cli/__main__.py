"""`python -m bayesattn.cli`, for `accelerate launch -m`."""

from bayesattn.cli import main

main()
