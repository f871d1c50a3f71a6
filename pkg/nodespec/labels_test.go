package nodespec_test

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"

	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

func TestLabels(t *testing.T) {
	const platform = "node.cloudprovider.kubernetes.io/platform"

	tooLong := strings.Repeat("a", 64)

	for _, test := range []struct {
		rule             string
		metadata         runtime.PlatformMetadataSpec
		ofTalos, ofUsers string
		want             map[string]string
		refused          []string
	}{
		{rule: "the platform alone", want: map[string]string{platform: "aws"}},
		{
			rule:     "region, zone and instance type come with their beta twins",
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
			rule:     "a spot instance says so",
			metadata: runtime.PlatformMetadataSpec{Spot: true},
			want:     map[string]string{platform: "aws", "node.cloudprovider.kubernetes.io/lifecycle": "spot"},
		},
		{
			rule:    "the cluster's name is the one that Talos knows",
			ofTalos: "prod",
			want:    map[string]string{platform: "aws", "node.cloudprovider.kubernetes.io/clustername": "prod"},
		},
		{
			rule:    "unless the user names another",
			ofTalos: "prod", ofUsers: "shop",
			want: map[string]string{platform: "aws", "node.cloudprovider.kubernetes.io/clustername": "shop"},
		},
		{
			rule:     "an invalid value is left out alone (R7)",
			metadata: runtime.PlatformMetadataSpec{Region: "eu/1", Zone: "eu-1a"},
			want: map[string]string{
				platform: "aws", "topology.kubernetes.io/zone": "eu-1a", "failure-domain.beta.kubernetes.io/zone": "eu-1a",
			},
			refused: []string{"topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region"},
		},
		{
			rule:     "so is one that is too long",
			metadata: runtime.PlatformMetadataSpec{Zone: tooLong, InstanceType: tooLong[1:]},
			want: map[string]string{
				platform: "aws", "node.kubernetes.io/instance-type": tooLong[1:], "beta.kubernetes.io/instance-type": tooLong[1:],
			},
			refused: []string{"topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone"},
		},
		{
			rule:     "an instance type with a blank is not a label",
			metadata: runtime.PlatformMetadataSpec{InstanceType: "Small Instance"},
			want:     map[string]string{platform: "aws"},
			refused:  []string{"node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type"},
		},
		{
			rule:    "a cluster's name may not be a label",
			ofTalos: "Prod (Frankfurt)",
			want:    map[string]string{platform: "aws"},
			refused: []string{"node.cloudprovider.kubernetes.io/clustername"},
		},
	} {
		t.Run(test.rule, func(t *testing.T) {
			in := running()
			in.Machine.Platform = test.metadata
			in.Machine.Platform.Platform, in.Machine.Platform.InstanceID, in.Machine.Platform.ProviderID = "aws", "i-1", "aws:///eu-1a/i-1"
			in.Machine.ClusterName, in.Options.ClusterName = test.ofTalos, test.ofUsers

			spec, problems := desired(t, in)
			if !maps.Equal(spec.Labels, test.want) {
				t.Errorf("got  %v\nwant %v", spec.Labels, test.want)
			}

			if got := keys(problems); !slices.Equal(got, test.refused) {
				t.Errorf("refused: got %v, want %v", got, test.refused)
			}
		})
	}
}

func TestThePlatformLabelIsTalossNameForIt(t *testing.T) {
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

func TestAProblemSaysKeyValueAndWhy(t *testing.T) {
	in := running()
	in.Machine.Platform.Zone = "rack 7"

	_, problems := desired(t, in)
	if len(problems) == 0 {
		t.Fatal("no problem")
	}

	for _, part := range []string{"topology.kubernetes.io/zone", `"rack 7"`, "alphanumeric"} {
		if got := problems[0].String(); !strings.Contains(got, part) {
			t.Errorf("%s does not mention %s", got, part)
		}
	}
}
