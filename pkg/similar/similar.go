// Package similar suggests what may have been meant by a mistyped word.
package similar

import "strings"

// Hint returns "did you mean …?" with the word that is most similar to the given one; empty if none is similar.
func Hint(word string, words []string) string {
	if near := Closest(word, words); near != "" {
		return "did you mean " + near + "?"
	}

	return ""
}

// Closest returns the word that is most similar to the given one, ignoring case; empty if none is similar.
func Closest(word string, words []string) string {
	word = strings.ToLower(word)

	// The cost grows exponentially with the number of edits.
	for edits := range min(len(word)/2+1, len(word)/3+2, 5) {
		for _, candidate := range words {
			if isSimilar(word, strings.ToLower(candidate), edits) {
				return candidate
			}
		}
	}

	return ""
}

// isSimilar reports whether the Levenshtein distance in bytes is at most the given number of edits.
func isSimilar(a, b string, edits int) bool {
	switch {
	case edits < 0:
		return false
	case a == "" || b == "":
		return len(a)+len(b) <= edits
	case a[0] == b[0]:
		return isSimilar(a[1:], b[1:], edits)
	default:
		return isSimilar(a[1:], b[1:], edits-1) || isSimilar(a[1:], b, edits-1) || isSimilar(a, b[1:], edits-1)
	}
}
