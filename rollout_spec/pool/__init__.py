"""A pool of engines, each a Ray actor, that a trainer drives like one engine. Only this package imports ray."""
