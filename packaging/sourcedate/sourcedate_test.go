package sourcedate_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/talos-ccm/talos-ccm/packaging/sourcedate"
)

func TestFromEnvironment(t *testing.T) {
	for value, want := range map[string]time.Time{
		"1700000000": time.Date(2023, 11, 14, 22, 13, 20, 0, time.UTC), "0": time.Unix(0, 0).UTC(), "": {}, "-1": {}, "2023-11-14": {},
	} {
		t.Setenv("SOURCE_DATE_EPOCH", value)

		got, err := sourcedate.FromEnvironment()
		assert.Equal(t, want, got, value)

		if want.IsZero() {
			assert.ErrorContains(t, err, "SOURCE_DATE_EPOCH", value)
		} else {
			assert.NoError(t, err, value)
		}
	}
}
