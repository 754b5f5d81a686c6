"""What the trees of a step teach: credit rules and added terms, one file a method."""
