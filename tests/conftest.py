"""Every test runs off-line; the number of torch threads (``OMP_NUM_THREADS``) stays what the caller set."""

import os

# Before any library reads them; `datasets` and `transformers` do at import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
