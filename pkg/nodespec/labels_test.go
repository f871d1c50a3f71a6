package nodespec_test

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"

	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

func TestDesired_Labels(t *testing.T) {
	const platform = "node.cloudprovider.kubernetes.io/platform"

	tooLong := strings.Repeat("a", 64)

	for _, test := range []struct {
		name                       string
		metadata                   runtime.PlatformMetadataSpec
		clusterName, configuration string
		want                       map[string]string
		problems                   []string
	}{
		{name: "platform only", want: map[string]string{platform: "aws"}},
		{
			name:     "region, zone and instance type with beta labels",
			metadata: runtime.PlatformMetadataSpec{Region: "eu-1", Zone: "eu-1a", InstanceType: "m5.large"},
			want: map[string]string{
				platform:                        "aws",
				"topology.kubernetes.io/region": "eu-1",
				"failure-domain.beta.kubernetes.io/region": "eu-1",
				"topology.kubernetes.io/zone":              "eu-1a",
				"failure-domain.beta.kubernetes.io/zone":   "eu-1a",
				"node.kubernetes.io/instance-type":         "m5.large",
				"beta.kubernetes.io/instance-type":         "m5.large",
			},
		},
		{
			name:     "spot instance",
			metadata: runtime.PlatformMetadataSpec{Spot: true},
			want:     map[string]string{platform: "aws", "node.cloudprovider.kubernetes.io/lifecycle": "spot"},
		},
		{
			name:        "cluster name of Talos",
			clusterName: "prod",
			want:        map[string]string{platform: "aws", "node.cloudprovider.kubernetes.io/clustername": "prod"},
		},
		{
			name:        "configured cluster name",
			clusterName: "prod", configuration: "shop",
			want: map[string]string{platform: "aws", "node.cloudprovider.kubernetes.io/clustername": "shop"},
		},
		{
			name:     "invalid region",
			metadata: runtime.PlatformMetadataSpec{Region: "eu/1", Zone: "eu-1a"},
			want: map[string]string{
				platform: "aws", "topology.kubernetes.io/zone": "eu-1a", "failure-domain.beta.kubernetes.io/zone": "eu-1a",
			},
			problems: []string{"topology.kubernetes.io/region"},
		},
		{
			name:     "zone too long",
			metadata: runtime.PlatformMetadataSpec{Zone: tooLong, InstanceType: tooLong[1:]},
			want: map[string]string{
				platform: "aws", "node.kubernetes.io/instance-type": tooLong[1:], "beta.kubernetes.io/instance-type": tooLong[1:],
			},
			problems: []string{"topology.kubernetes.io/zone"},
		},
		{
			name:     "invalid instance type",
			metadata: runtime.PlatformMetadataSpec{InstanceType: "Small Instance"},
			want:     map[string]string{platform: "aws"},
			problems: []string{"node.kubernetes.io/instance-type"},
		},
		{
			name:        "invalid cluster name",
			clusterName: "Prod (Frankfurt)",
			want:        map[string]string{platform: "aws"},
			problems:    []string{"node.cloudprovider.kubernetes.io/clustername"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := running()
			in.Machine.Platform = test.metadata
			in.Machine.Platform.Platform, in.Machine.Platform.InstanceID, in.Machine.Platform.ProviderID = "aws", "i-1", "aws:///eu-1a/i-1"
			in.Machine.ClusterName, in.Options.ClusterName = test.clusterName, test.configuration

			spec, problems := desired(t, in)
			if !maps.Equal(spec.Labels, test.want) {
				t.Errorf("got  %v\nwant %v", spec.Labels, test.want)
			}

			if got := keys(problems); !slices.Equal(got, test.problems) {
				t.Errorf("problems: got %v, want %v", got, test.problems)
			}
		})
	}
}

func TestDesired_PlatformLabel(t *testing.T) {
	for platform, row := range identities() {
		t.Run(platform, func(t *testing.T) {
			in := running()
			in.Machine.Platform = row.metadata
			in.Machine.Platform.Platform = platform

			if spec, _ := desired(t, in); spec.Labels[nodespec.LabelPlatform] != platform {
				t.Errorf("got %v", spec.Labels)
			}
		})
	}
}

func TestProblem_StringHasKeyValueAndReason(t *testing.T) {
	in := running()
	in.Machine.Platform.Zone = "rack 7"

	_, problems := desired(t, in)
	if len(problems) == 0 {
		t.Fatal("no problem")
	}

	for _, part := range []string{"topology.kubernetes.io/zone", `"rack 7"`, "alphanumeric"} {
		if got := problems[0].String(); !strings.Contains(got, part) {
			t.Errorf("%s does not contain %s", got, part)
		}
	}
}

func TestProblem_StringShortensValues(t *testing.T) {
	got := nodespec.Problem{Key: "labels[a]", Value: strings.Repeat("ä", 100), Why: "too long", Rule: "r"}.String()
	if want := `rule "r": labels[a]="` + strings.Repeat("ä", 80) + `" omitted: too long`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
