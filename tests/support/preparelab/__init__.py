"""How long a backup takes to prepare on JuiceFS over an object store of a set pace: what is measured, and its table."""
