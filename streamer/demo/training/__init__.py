"""What made the bundled model: its texts, their generators and the training script.

Needs a checkout: the wheel has the weights alone.
"""
