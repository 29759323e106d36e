"""What evaluation and training share. Never imports lm_eval, optout_train or click."""
