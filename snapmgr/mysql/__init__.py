"""MySQL and MariaDB: who answers at a socket, what it writes where, how it is held still, and whether a copy starts."""
