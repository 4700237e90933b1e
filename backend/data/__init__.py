"""Training data as token ids: texts, token files, blends, tokenizers, and the samples of a run. Knows no rank."""
