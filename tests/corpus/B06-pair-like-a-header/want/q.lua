one
++ b/x
two
