"""The indexers as the gateway calls them: asked for overlaps, told where prompts went, checked against engines."""
