"""Plans and runs shown: text, one HTML page, traces."""
