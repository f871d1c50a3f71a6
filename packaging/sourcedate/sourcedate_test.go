package sourcedate_test

import (
	"strings"
	"testing"
	"time"

	"github.com/talos-ccm/talos-ccm/packaging/sourcedate"
)

func TestFromEnvironment(t *testing.T) {
	for _, test := range []struct {
		name, value string
		want        time.Time
	}{
		{name: "Unix time", value: "1700000000", want: time.Date(2023, 11, 14, 22, 13, 20, 0, time.UTC)},
		{name: "zero", value: "0", want: time.Unix(0, 0).UTC()},
		{name: "empty", value: ""},
		{name: "negative", value: "-1"},
		{name: "date", value: "2023-11-14"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("SOURCE_DATE_EPOCH", test.value)

			got, err := sourcedate.FromEnvironment()
			if got != test.want || (err != nil) != test.want.IsZero() {
				t.Errorf("got %s, %v; want %s", got, err, test.want)
			}

			if err != nil && !strings.Contains(err.Error(), "SOURCE_DATE_EPOCH") {
				t.Errorf("error %v does not contain SOURCE_DATE_EPOCH", err)
			}
		})
	}
}
