"""Chats in the shape of the OpenAI API: renders requests to tokens and reads answers from text."""
