"""Training text as token ids: corpora, vocabularies, documents. Knows no rank."""
