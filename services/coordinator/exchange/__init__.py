"""The exchange: from an admitted group to a trained batch. One module for each kind of request."""
