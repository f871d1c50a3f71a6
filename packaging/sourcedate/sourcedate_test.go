package sourcedate_test

import (
	"strings"
	"testing"
	"time"

	"github.com/talos-ccm/talos-ccm/packaging/sourcedate"
)

func TestFromEnvironment(t *testing.T) {
	for _, test := range []struct {
		rule, value string
		want        time.Time
	}{
		{rule: "seconds since 1970", value: "1700000000", want: time.Date(2023, 11, 14, 22, 13, 20, 0, time.UTC)},
		{rule: "1970 itself", value: "0", want: time.Unix(0, 0).UTC()},
		{rule: "not without a value", value: ""},
		{rule: "not before 1970", value: "-1"},
		{rule: "not a date", value: "2023-11-14"},
	} {
		t.Run(test.rule, func(t *testing.T) {
			t.Setenv("SOURCE_DATE_EPOCH", test.value)

			got, err := sourcedate.FromEnvironment()
			if got != test.want || (err != nil) != test.want.IsZero() {
				t.Errorf("got %s, %v; want %s", got, err, test.want)
			}

			if err != nil && !strings.Contains(err.Error(), "SOURCE_DATE_EPOCH") {
				t.Errorf("%v does not say what to set", err)
			}
		})
	}
}
