"""Every server, lock level, set of engines and layout: snapshots of each under load, and what is checked of them."""
