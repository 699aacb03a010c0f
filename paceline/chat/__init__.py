"""Chats as the OpenAI API has them: messages to tokens by the chat template, text to answers. Knows no server, no engine."""
