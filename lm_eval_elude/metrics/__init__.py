"""What is computed from logged samples, without torch and without the harness."""
