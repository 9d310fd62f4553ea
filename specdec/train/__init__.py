"""Training of learned drafters: prompts, responses, features, one loop for every head. Only entries import it."""
