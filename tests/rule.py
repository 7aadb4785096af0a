"""The rule that says what is right, under the name that the tests call it by: llamac/rule.py."""

from llamac.rule import BACKWARD, FORWARD, Error, error_of, floor_of, violation

__all__ = ["BACKWARD", "FORWARD", "Error", "error_of", "floor_of", "violation"]
