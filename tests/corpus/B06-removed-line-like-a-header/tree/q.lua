one
-- a/comment
two
three
4
5
6
7
8
a
b
c
d
