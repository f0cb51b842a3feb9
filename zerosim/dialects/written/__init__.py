"""Files of other frameworks, written from a configuration: the smallest that says all that their framework can say."""
