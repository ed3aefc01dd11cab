"""The resilient loop: leaving upstream's trainer in the middle of a step, repairing, and entering it again."""
