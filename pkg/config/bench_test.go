package config_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/talos-ccm/talos-ccm/pkg/config"
)

// BenchmarkParse parses 100 rules with a selector and two templates each.
func BenchmarkParse(b *testing.B) {
	var file strings.Builder

	file.WriteString("transformations:\n")

	for i := range 100 {
		fmt.Fprintf(&file, `- name: rule-%d
  nodeSelector: [{matchExpressions: [{key: hostname, operator: Regexp, values: ['^web-%d-']}]}]
  labels: {example.org/zone: '{{ .Zone | lower }}', example.org/number: '%d'}
  annotations: {example.org/id: 'id-{{ .InstanceID }}'}
`, i, i, i)
	}

	data := []byte(file.String())

	b.SetBytes(int64(len(data)))

	for b.Loop() {
		if _, err := config.Parse("config.yaml", data); err != nil {
			b.Fatal(err)
		}
	}
}
