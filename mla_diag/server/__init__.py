"""One live SGLang server: ask it, load it, capture a profile of it, and say whether it copies its KV pool."""
