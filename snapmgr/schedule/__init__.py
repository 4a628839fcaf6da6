"""When jobs run: calendar expressions, the systemd units or the cron line for one, and their place on the machine."""
