"""What does not hold yet, by habit; the tests expect these to fail, so that mending one is seen. Empty, and kept so."""

TODAY: dict[str, str] = {}
