"""The papers' experiments, a package a paper."""

from retime.foundations import workers

workers.PRELOADED.append("retime.recipes.modnn.budget_worker")
