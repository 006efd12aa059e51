"""The indexers as the gateway calls them: overlaps, reports of routed prompts, checks against engines."""
