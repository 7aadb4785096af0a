"""`llamac serve DIR`: an OpenAI-compatible endpoint and a chat page."""
