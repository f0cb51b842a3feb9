"""Files of other frameworks, written from runs of zerosim. A writer a framework."""
