"""Why the hit rate is what it is: where the prompt tokens of requests could have been cached, and where they were."""
