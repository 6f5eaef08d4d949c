"""The source of the bundled model: its texts, their generators and the training script.

Needs a checkout: the wheel has only the weights.
"""
