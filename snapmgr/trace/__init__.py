"""What a JuiceFS client did: its access log recorded, added up, judged and drawn."""
