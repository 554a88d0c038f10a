one
-- a/x
two
