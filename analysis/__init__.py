"""What was learned, looked at: pictures, the explorer page, heads taken out, runs side by side."""
