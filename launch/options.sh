# Checks of options, sourced by the launchers that run in this folder; `fail` is theirs.

whole() { # OPTION VALUE LEAST MOST: the value is a whole number in these bounds
  [[ -n $2 ]] || fail "$1 needs a number"
  [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] && (($2 >= $3 && $2 <= $4)) || fail "$1 $2: a whole number from $3 to $4 is allowed"
}

makeable() { # OPTION FOLDER: the folder is there or can be made
  local place=$2
  while [[ ! -e $place && ! -L $place ]]; do place=$(dirname "$place"); done
  [[ -d $place && -w $place ]] || fail "$1 $2: cannot be made, since $place is not a folder that can be written"
}
