"""A leaderboard in one git repository: a submission names a checkpoint, the maintainer scores it."""
