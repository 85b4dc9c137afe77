"""One installation on this machine: its home folder, its listening socket, how it is brought up, examined and ended."""
