"""Chats in the shape of the OpenAI API: renders requests to tokens with the chat template and reads answers from text.
Knows no server and no engine."""
