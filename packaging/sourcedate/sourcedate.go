// Package sourcedate has the timestamp for reproducible packages.
package sourcedate

import (
	"fmt"
	"os"
	"strconv"
	"time"
)

// variable is specified in https://reproducible-builds.org/specs/source-date-epoch/.
const variable = "SOURCE_DATE_EPOCH"

// FromEnvironment returns the time in SOURCE_DATE_EPOCH, a Unix time. The Makefile sets it to the time of the commit.
func FromEnvironment() (time.Time, error) {
	seconds, err := strconv.ParseInt(os.Getenv(variable), 10, 64)
	if err != nil || seconds < 0 {
		return time.Time{}, fmt.Errorf("environment variable %s: %q is not a Unix time; it must be set outside a git checkout", variable, os.Getenv(variable))
	}

	return time.Unix(seconds, 0).UTC(), nil
}
