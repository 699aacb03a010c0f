"""Chats as the OpenAI API has them: requests to tokens by the chat template, text to answers. Knows no server and no engine."""
